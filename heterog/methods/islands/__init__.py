"""Islands: a slice of the model for each kind of machine, composed into unlike pipelines.

``slices`` prices layers on teams of one kind, ``composing`` estimates what machines make of the
model together, and ``search`` is the planner that simulates the best of these and their
``variants``; ``building`` makes a strategy of one.
"""
