"""Trainers on fixed data: demonstrations, preferences, teachers and reward models."""
