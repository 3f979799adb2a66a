"""How large the house is, how often its paths turn back, and whether a move changed an answer."""
