"""What MOSS-TTS-Local wants done to a recording before its codec hears it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TARGET_DB = -20.0  # full scale, over all channels
MAX_GAIN_DB = 3.0


def normalised(pcm: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """pcm float32 [samples, channels], up to 3 dB louder or softer, towards a level of -20 dB."""
    if not pcm.size:
        return pcm
    power = float(np.mean(np.square(pcm, dtype=np.float32), dtype=np.float32))
    level_db = 10 * np.log10(power + 1e-9)
    gain_db = min(max(TARGET_DB - level_db, -MAX_GAIN_DB), MAX_GAIN_DB)
    return pcm * np.float32(10 ** (gain_db / 20))
