"""Branch and bound."""
