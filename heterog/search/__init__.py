"""The search for a plan: the request, how methods share a budget, and the plan that results.

- ``request`` holds the request, its session, and strategies that a person or an earlier search
  supplies; ``conformance`` checks a new method.
- ``portfolio`` runs methods (all of them for ``auto``) and compares them: ``judging`` judges one,
  or several in rounds and on several workers, ``sharing`` divides the budget, ``allotment`` keeps
  the deadline.
- ``rows`` are the results of methods, and how sure a gain is; ``history`` records the progress of
  a search.
- ``dataset`` stores solved pairs as training data.
- ``plan`` is the result, ``plan_file`` its file, ``issue_order`` the order of its tasks.
- ``objective`` says which outcome is better, and what a plan costs; ``cheapest`` searches cheap
  sets of hosts, and maps their plans to the whole cluster.
- Beside a plan: ``background`` jobs, ``arrivals`` of jobs.
"""
