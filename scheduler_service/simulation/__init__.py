"""The real core against modelled workers, on a clock of its own: what a fleet would do, without the fleet."""
