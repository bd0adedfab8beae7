"""The lane's demonstration: a SIMULATED population uses a lane, answers, and is answered better, cycle by cycle."""
