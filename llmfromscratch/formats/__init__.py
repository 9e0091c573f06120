"""Readers of model files: safetensors, GGUF and PyTorch's zip format.

Each reader maps its file and gives a dictionary of `StoredTensor`; nothing is copied until a tensor is read.
A file that is damaged or unsupported raises `CheckpointError`, and no code from a file ever runs.
"""
