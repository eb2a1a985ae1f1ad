"""A request's way: queue, intake, tries at workers, the answer back."""
