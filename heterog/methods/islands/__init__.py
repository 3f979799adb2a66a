"""Islands: a slice of the model for each kind of machine, composed into unlike pipelines.

``slices`` prices layers on teams of one kind, ``composing`` estimates what machines make of the
model together, lists variants of it, and makes strategies; ``planner`` is the method that
simulates the best of these.
"""
