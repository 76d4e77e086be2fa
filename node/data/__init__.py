"""Text to samples: who trains on what, tokenizers, sources of documents and the stream of token windows."""
