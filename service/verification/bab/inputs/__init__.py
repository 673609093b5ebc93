"""Branch and bound over boxes of inputs, for networks of few inputs."""
