"""Islands: a slice of the model for each kind of machine, composed into unlike pipelines.

``slices`` prices layers on teams of one kind. ``composing`` estimates compositions of islands and
makes their strategies. ``variants`` lists what may be tried after a composition, and says what is
tried next. ``planner`` is the method, which simulates the best.
"""
