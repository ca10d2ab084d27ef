"""The MLX backend, on models of mlx-lm."""
