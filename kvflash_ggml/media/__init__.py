"""Media rows: what stands for an image in a text, and the embeddings that a model reads in its place."""
