"""Import and export of weights, as safetensors files and transformers directories."""
