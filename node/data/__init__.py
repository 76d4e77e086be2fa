"""From text to samples: sources of documents, tokenizers, and the stream of token windows."""
