"""Export of a model as a Hugging Face folder, and import of one. Nothing here imports transformers."""
