"""A checkpoint in the forms of others: torch's, safetensors', Hugging Face's, stock DCP's."""
