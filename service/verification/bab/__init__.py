"""Branch and bound over a model's inputs or activations, with the attack before it: :mod:`.driver` decides a query."""
