"""The sub-commands of ``rlkit``, one module each: see ``rlkit.cli``."""
