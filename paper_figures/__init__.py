"""Figures: one module each, a table made from runs and a drawing made from the table alone."""
