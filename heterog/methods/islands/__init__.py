"""Islands: a slice of the model for each kind of machine, composed into unlike pipelines.

``slices`` prices layers on teams of one kind. ``composing`` estimates compositions of islands,
lists their variants, and makes their strategies. ``planner`` is the method, which simulates the
best.
"""
