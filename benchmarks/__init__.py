"""Benchmarks of lightrft; each file is a script, and ``benchmarks.gpu`` runs those that need a GPU."""
