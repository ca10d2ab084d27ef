"""PyTorch on CPU, CUDA and MPS, with the models of transformers."""
