"""The server's part in rollouts of model versions."""
