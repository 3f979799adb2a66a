"""Islands: a slice of the model for each kind of machine, composed into unlike pipelines.

``slices`` prices layers on teams of one kind, ``composing`` estimates what machines make of the
model together, and lists variants of it; ``search`` is the planner that simulates the best of
these; ``building`` makes a strategy of one.
"""
