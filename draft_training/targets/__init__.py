"""What a head is trained towards: trees of the target with its features, and documents in rows."""
