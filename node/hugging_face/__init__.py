"""Our model as a folder of the Hugging Face layout, there and back. Nothing here imports transformers."""
