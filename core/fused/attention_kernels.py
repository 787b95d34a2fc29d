"""The attention kernels; attention.py says what they compute.

Shape suffixes: R rows, K step-1 keys (packed rows), N query heads, G key/value heads, D head width, J steps.
Scores are kept in base 2: `scale` is D^-1/2 * log2(e), LSE is a log2-sum-exp2.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(X, row, count, column, STRIDE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows row .. row + ROWS of a matrix, columns column .. column + D; zeros past row `count`."""
    r = row + tl.arange(0, ROWS)
    at = r[:, None].to(tl.int64) * STRIDE + column + tl.arange(0, D)[None, :]
    return tl.load(X + at, mask=r[:, None] < count, other=0.0)


@triton.jit
def _stream(X, row, count, column, STRIDE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """`_tile` of what an inner loop reads: `X` is a tensor descriptor where the copy engine fetches it."""
    if TMA:
        return X.load([row, column])
    else:
        return _tile(X, row, count, column, STRIDE, ROWS, D)


@triton.jit
def _seen(keys, rows, documents, ahead, window):
    """Keys of the row's document up to the row, at most `window` positions behind the query, which is `ahead` of it."""
    return (keys >= documents) & (keys <= rows) & (keys + window > rows + ahead)


@triton.jit
def _attend_keys(
    q, K, V, g, rows, documents, ahead, window, first, end, keys, scale, best, total, acc,
    STRIDE: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Running softmax of a tile of rows over keys first .. end."""
    for k0 in tl.range(first, end, BN):
        k = _stream(K, k0, keys, g * D, STRIDE, BN, D, TMA)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            at = k0 + tl.arange(0, BN)
            seen = _seen(at[None, :], rows[:, None], documents[:, None], ahead, window) & (at[None, :] < end)
            s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(best, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - higher[:, None])  # one fused multiply-add a score
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(p, 1)
        v = _stream(V, k0, keys, g * D, STRIDE, BN, D, TMA)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        best = higher
    return best, total, acc


@triton.jit
def _forward(
    Q, K, V, OWN_K, OWN_V, OUT, LSE, ROWS, DOCUMENTS, TILES, count, keys, own, window, scale,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    m = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest tiles first
    n = tl.program_id(1)
    g = n // (N // G)
    r = m * BM + tl.arange(0, BM)
    rows = tl.load(ROWS + r, mask=r < count, other=-1)
    documents = tl.load(DOCUMENTS + r, mask=r < count, other=0)
    q = _tile(Q, m * BM, count, n * D, N * D, BM, D)
    # Finite: a tile may begin with keys that a row does not see, and -inf minus -inf would be nan.
    best = tl.full([BM], -1.0e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for i in range(tl.maximum(own - window, 0), own):
        k = _tile(OWN_K, i * count + m * BM, (i + 1) * count, g * D, G * D, BM, D)
        s = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
        higher = tl.maximum(best, s)
        p, shrink = tl.exp2(s - higher), tl.exp2(best - higher)
        v = _tile(OWN_V, i * count + m * BM, (i + 1) * count, g * D, G * D, BM, D)
        acc = acc * shrink[:, None] + p[:, None] * v.to(tl.float32)
        total = total * shrink + p
        best = higher
    for part in tl.static_range(3):  # keys that some rows see, that all rows see, that some rows see
        first, end = tl.load(TILES + m * 4 + part), tl.load(TILES + m * 4 + part + 1)
        best, total, acc = _attend_keys(
            q, K, V, g, rows, documents, own, window, first, end, keys, scale, best, total, acc,
            G * D, D, BN, part != 1, PRECISION, TMA,
        )  # fmt: skip
    total = tl.where(total > 0.0, total, 1.0)  # of rows past the end, and of those that see no key here
    at = r[:, None].to(tl.int64) * (N * D) + n * D + tl.arange(0, D)[None, :]
    tl.store(OUT + at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=r[:, None] < count)
    tl.store(LSE + n * count + r, best + tl.log2(total), mask=r < count)


@triton.jit
def _grad_q_keys(
    q, do, lse, delta, K, V, g, rows, documents, ahead, window, first, end, keys, scale, dq,
    STRIDE: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Adds the part of keys first .. end to the queries' gradient (without the scale)."""
    for k0 in tl.range(first, end, BN):
        k = _stream(K, k0, keys, g * D, STRIDE, BN, D, TMA)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.exp2(s * scale - lse[:, None])
        if MASKED:
            at = k0 + tl.arange(0, BN)
            seen = _seen(at[None, :], rows[:, None], documents[:, None], ahead, window) & (at[None, :] < end)
            p = tl.where(seen, p, 0.0)
        v = _stream(V, k0, keys, g * D, STRIDE, BN, D, TMA)
        ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _grad_q(
    Q, K, V, OWN_K, OWN_V, OUT, DO, LSE, DELTA, DQ, ROWS, DOCUMENTS, TILES, count, keys, own, window, scale,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    n = tl.program_id(1)
    g = n // (N // G)
    r = m * BM + tl.arange(0, BM)
    rows = tl.load(ROWS + r, mask=r < count, other=-1)
    documents = tl.load(DOCUMENTS + r, mask=r < count, other=0)
    q = _tile(Q, m * BM, count, n * D, N * D, BM, D)
    do = _tile(DO, m * BM, count, n * D, N * D, BM, D)
    o = _tile(OUT, m * BM, count, n * D, N * D, BM, D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(DELTA + n * count + r, delta, mask=r < count)
    lse = tl.load(LSE + n * count + r, mask=r < count, other=0.0)
    dq = tl.zeros([BM, D], tl.float32)
    for i in range(tl.maximum(own - window, 0), own):
        k = _tile(OWN_K, i * count + m * BM, (i + 1) * count, g * D, G * D, BM, D).to(tl.float32)
        v = _tile(OWN_V, i * count + m * BM, (i + 1) * count, g * D, G * D, BM, D).to(tl.float32)
        p = tl.exp2(tl.sum(q.to(tl.float32) * k, 1) * scale - lse)
        ds = p * (tl.sum(do.to(tl.float32) * v, 1) - delta)
        dq += ds[:, None] * k
    for part in tl.static_range(3):
        first, end = tl.load(TILES + m * 4 + part), tl.load(TILES + m * 4 + part + 1)
        dq = _grad_q_keys(
            q, do, lse, delta, K, V, g, rows, documents, own, window, first, end, keys, scale, dq,
            G * D, D, BN, part != 1, PRECISION, TMA,
        )  # fmt: skip
    at = r[:, None].to(tl.int64) * (N * D) + n * D + tl.arange(0, D)[None, :]
    tl.store(DQ + at, (dq * (scale * 0.6931471805599453)).to(DQ.dtype.element_ty), mask=r[:, None] < count)


@triton.jit
def _grad_kv_rows(
    k, v, Q, DO, LSE, DELTA, ROWS, DOCUMENTS, step, window, n, k0, first, end, count, scale, dk, dv,
    N: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds the part of rows first .. end of one step and head to the gradient of a tile of keys."""
    for r0 in tl.range(first, end, BM):
        r = r0 + tl.arange(0, BM)
        q = _stream(Q, step * count + r0, (step + 1) * count, n * D, N * D, BM, D, TMA)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        lse = tl.load(LSE + (step * N + n) * count + r, mask=r < count, other=0.0)
        p = tl.exp2(s * scale - lse[None, :])
        if MASKED:
            at = k0 + tl.arange(0, BN)
            rows = tl.load(ROWS + r, mask=r < count, other=-1)
            documents = tl.load(DOCUMENTS + r, mask=r < count, other=0)
            seen = _seen(at[:, None], rows[None, :], documents[None, :], step, window) & (r[None, :] < end)
            p = tl.where(seen, p, 0.0)
        do = _stream(DO, step * count + r0, (step + 1) * count, n * D, N * D, BM, D, TMA)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        delta = tl.load(DELTA + (step * N + n) * count + r, mask=r < count, other=0.0)
        ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _grad_kv(
    Q, K, V, DO, LSE, DELTA, DK, DV, ROWS, DOCUMENTS, TILES, count, keys, steps, window, scale,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)  # the first keys are seen by most rows: the longest tiles first
    g = tl.program_id(1)
    k0 = t * BN
    k = _tile(K, k0, keys, g * D, G * D, BN, D)
    v = _tile(V, k0, keys, g * D, G * D, BN, D)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    for pair in range(steps * (N // G)):
        step, n = pair // (N // G), g * (N // G) + pair % (N // G)
        for part in tl.static_range(3):
            first, end = tl.load(TILES + t * 4 + part), tl.load(TILES + t * 4 + part + 1)
            dk, dv = _grad_kv_rows(
                k, v, Q, DO, LSE, DELTA, ROWS, DOCUMENTS, step, window, n, k0, first, end, count, scale, dk, dv,
                N, D, BM, BN, part != 1, PRECISION, TMA,
            )  # fmt: skip
    at = (k0 + tl.arange(0, BN))[:, None]
    to = at.to(tl.int64) * (G * D) + g * D + tl.arange(0, D)[None, :]
    tl.store(DK + to, (dk * (scale * 0.6931471805599453)).to(DK.dtype.element_ty), mask=at < keys)
    tl.store(DV + to, dv.to(DV.dtype.element_ty), mask=at < keys)
