"""How the systems are run, recorded and compared."""
