from __future__ import annotations

from fleetx.part import Part, settings


@settings
class FP16AllReduce(Part):
    """Send gradients in half precision, and use them in float32."""
