"""Which heads of a model find what a question asks for, measured on documents whose answers are known."""
