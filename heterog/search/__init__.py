"""The search for a plan: what is asked, how methods share a budget, and the plan that results.

- ``request`` is what is asked, and its session; ``conformance`` checks a new method.
- ``portfolio`` runs methods and is ``auto``: ``judging`` judges one, or several in rounds and on
  several workers, ``sharing`` divides the budget, ``allotment`` keeps an answer in time, ``seeds``
  and ``library`` hand over strategies that are known before, or a person's own.
- ``compare`` puts methods side by side; ``stability`` asks how sure a gain is, ``history`` keeps
  how a search went.
- ``dataset`` keeps solved pairs for others to learn from.
- ``plan`` is the result, ``plan_file`` its file, ``issue_order`` the order of its tasks.
- ``objective`` says which outcome is better; ``cheapest`` looks for cheap sets of hosts
  (``host_subset`` carries plans over), ``cost`` is what a plan costs.
- Beside a plan: ``background`` jobs, ``arrivals`` of jobs.
"""
