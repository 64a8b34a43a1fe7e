"""From logits to tokens: settings, truncation, processing, and the only randomness."""
