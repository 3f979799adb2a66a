"""The search for a plan: what is asked, how methods share a budget, and the plan that results.

- ``request`` is what is asked, its session, and what strategies a person or an earlier search has
  handed over; ``conformance`` checks a new method.
- ``portfolio`` runs methods and is ``auto``: ``judging`` judges one, or several in rounds and on
  several workers, ``sharing`` divides the budget, ``allotment`` keeps an answer in time.
- ``compare`` puts methods side by side; ``stability`` asks how sure a gain is, ``history`` keeps
  how a search went.
- ``dataset`` keeps solved pairs for others to learn from.
- ``plan`` is the result, ``plan_file`` its file, ``issue_order`` the order of its tasks.
- ``objective`` says which outcome is better, and what a plan costs; ``cheapest`` looks for cheap
  sets of hosts, and carries plans over.
- Beside a plan: ``background`` jobs, ``arrivals`` of jobs.
"""
