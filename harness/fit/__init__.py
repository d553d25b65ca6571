"""Is the simulator right? Coefficients fitted to public measurements, and checks against others."""
