"""How true predictions are: recorded runs beside what the simulator says of them."""
