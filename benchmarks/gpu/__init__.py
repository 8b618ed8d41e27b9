"""Measurements on a GPU, one command: ``python -m benchmarks.gpu`` (``make gpu``).

``catalog`` lists the measurements, ``runner`` runs each in a process of its own, ``store`` keeps one JSON file per
measurement, and ``page`` renders them. ``--reduced`` runs the same functions on the CPU with tiny shapes.
"""
