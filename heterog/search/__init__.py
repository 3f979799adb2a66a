"""Methods that propose strategies, one file each, and the search service that runs them.

The service:

- ``planner`` is the protocol and the budgets, ``methods`` the table of methods, ``registry`` makes
  them and finds them by name, ``conformance`` checks a new one.
- ``request`` is what is asked of a search, and its session.
- ``portfolio`` runs methods and is ``auto``: ``judging`` judges one, ``sharing`` and ``rounds``
  divide the budget, ``allotment`` keeps an answer in time, ``together`` uses several workers,
  ``seeds`` and ``library`` hand over strategies that are known before, ``given`` a person's own.
- ``compare`` puts methods side by side; ``stability`` asks how sure a gain is, ``history`` keeps
  how a search went.
- ``plan`` is the result, ``plan_file`` its file (``plan_checks``), ``issue_order`` the order of
  its tasks.
- ``objective`` says which outcome is better; ``cheapest`` looks for cheap ``host_sets``
  (``host_subset`` carries plans over), ``cost`` is what a plan costs.

The methods, exact:

- ``data_parallel``, ``best_ddp``, ``model_parallel``, ``tuned_uniform``, ``two_segment``,
  ``megatron_grid`` enumerate (``enumeration``), ``pipeline`` and ``islands`` cut the model into
  stages.
- ``local_search`` moves through ``neighbours`` with ``group_rules``.
- ``hap`` (``spmd``), ``poplar``, ``deeppool`` (``burst``) and ``pipette`` are others' methods;
  ``dedication`` moves alike hosts (``host_kinds``, ``host_order``).
- ``spatial`` and ``sequences`` cut samples (``unit_search``).

What methods share: points that were ``tried``, ``changes`` of a strategy, ``repair`` of what does
not fit, ``recomputing``, ``teams``, ``communities`` of near hosts. Beside a plan: ``background``
jobs, ``arrivals`` of jobs.
"""
