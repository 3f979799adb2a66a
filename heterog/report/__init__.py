"""Tables and traces for people."""
