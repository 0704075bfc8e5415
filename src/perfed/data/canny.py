"""Canny's edge detector for stacks of small gray images.

J. Canny, A Computational Approach to Edge Detection, IEEE PAMI 8(6), 1986: smooth, differentiate, keep the
ridges of the gradient's magnitude, and of those the strong ones and the weak ones connected to a strong one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import ndimage

Images = npt.NDArray[np.uint8]


def canny(gray: Images, sigma: float = 1.0, low: float = 0.1, high: float = 0.2) -> npt.NDArray[np.bool_]:
    """The edge pixels of images (N, H, W); thresholds are shares of the steepest step there can be."""
    smooth = ndimage.gaussian_filter(gray.astype(np.float32) / 255, (0, sigma, sigma), mode="nearest")
    down, right = _slope(smooth, 1, 2), _slope(smooth, 2, 1)
    ridge = _ridges(np.hypot(down, right), down, right)
    weak = ridge >= 4 * low  # a step from 0 to 1 has the Sobel magnitude 4 before smoothing
    strong = ridge >= 4 * high
    touching = np.zeros((3, 3, 3), bool)
    touching[1] = True  # pixels touch their eight neighbours, never another image
    pieces, number = ndimage.label(weak, touching)
    kept = np.zeros(number + 1, bool)
    kept[np.unique(pieces[strong])] = True
    kept[0] = False
    edges: npt.NDArray[np.bool_] = kept[pieces]
    return edges


def _slope(smooth: npt.NDArray[np.float32], axis: int, across: int) -> npt.NDArray[np.float32]:
    """Sobel's derivative inside each image (ndimage.sobel would also blend neighbours in the stack)."""
    blended = ndimage.correlate1d(smooth, [1.0, 2.0, 1.0], axis=across, mode="nearest")
    slope: npt.NDArray[np.float32] = ndimage.correlate1d(blended, [-1.0, 0.0, 1.0], axis=axis, mode="nearest")
    return slope


def _ridges(
    size: npt.NDArray[np.float32], down: npt.NDArray[np.float32], right: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """The magnitude where it is the largest along the gradient, else 0; the image's frame has no edges."""
    angle = np.rad2deg(np.arctan2(down, right)) % 180
    padded = np.pad(size, ((0, 0), (1, 1), (1, 1)))
    height, width = size.shape[1:]
    keep = np.zeros(size.shape, bool)
    for centre, (dy, dx) in ((0, (0, 1)), (45, (1, 1)), (90, (1, 0)), (135, (1, -1))):
        along = np.minimum(np.abs(angle - centre), 180 - np.abs(angle - centre)) <= 22.5
        ahead = padded[:, 1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width]
        behind = padded[:, 1 - dy : 1 - dy + height, 1 - dx : 1 - dx + width]
        keep |= along & (size > ahead) & (size >= behind)  # of two equal neighbours one stays
    keep[:, [0, -1]] = False
    keep[:, :, [0, -1]] = False
    return np.where(keep, size, np.float32(0))
