"""The machine: hardware, software, ceilings, telemetry and flags."""
