"""`python -m pipelines.run stage=...`: one thin file a stage; config in, library calls, files out."""
