// Writes staged rows of block ids into rows of a table, with the scale and offset of each plane: one launch for all planes and rows.
// What is staged may lie in host memory; each id is read once, by neighbouring threads together.
typedef long long Int;

struct StageRows {
    Int staged, table, row_stride, planes, rows, width, columns;
};

struct Plane {
    Int start, scale, offset;
};

extern "C" __global__ void __launch_bounds__(512) stage_rows(const __grid_constant__ StageRows job) {
    const int* ids = reinterpret_cast<const int*>(job.staged);
    const Int* rows = reinterpret_cast<const Int*>(job.staged + (4 * job.rows * job.width + 7) / 8 * 8);
    const Plane* planes = reinterpret_cast<const Plane*>(rows + job.rows);
    for (Int i = blockIdx.x; i < job.rows; i += gridDim.x) {
        const Int target = job.table + rows[i] * job.row_stride;
        for (Int j = threadIdx.x; j < job.columns; j += blockDim.x) {
            const int id = j < job.width ? ids[i * job.width + j] : -1;
            for (Int p = 0; p < job.planes; ++p) {
                const Int value = id < 0 ? -1 : id * planes[p].scale + planes[p].offset;
                reinterpret_cast<int*>(target + planes[p].start)[j] = (int)value;
            }
        }
    }
}
