"""The paper's figures, one module each: a table in, a figure out. (None yet in this version.)"""
