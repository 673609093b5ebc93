"""What a compile check publishes: the gate, the summary, and a row for every rung."""
