// Writes staged rows of block ids into rows of a table, with the scale and offset of each plane: one launch for many
// planes and rows.
//
// Only the ids lie in memory, which may be the host's: each is read once, by neighbouring threads together. All else is
// in the argument.
typedef long long Int;

constexpr int PLANES = 120;
constexpr int ROWS = 512;

struct Plane {
    Int start;  // of the plane, counted from the table
    unsigned scale, offset;  // modulo 2^32: values fit into 32 bits, what is on the way to them need not
};

struct StageRows {
    Int ids, table, row_stride, planes, rows, width, columns;
    Plane plane[PLANES];
    unsigned row[ROWS];
};

extern "C" __global__ void __launch_bounds__(512) stage_rows(const __grid_constant__ StageRows job) {
    const unsigned width = (unsigned)job.width, columns = (unsigned)job.columns, planes = (unsigned)job.planes;
    for (unsigned i = blockIdx.x; i < (unsigned)job.rows; i += gridDim.x) {
        const int* ids = reinterpret_cast<const int*>(job.ids) + (Int)i * width;
        const Int target = job.table + job.row[i] * job.row_stride;
        for (unsigned j = threadIdx.x; j < columns; j += blockDim.x) {
            const int id = j < width ? __ldg(ids + j) : -1;
            for (unsigned p = 0; p < planes; ++p) {
                const int value = id < 0 ? -1 : (int)((unsigned)id * job.plane[p].scale + job.plane[p].offset);
                reinterpret_cast<int*>(target + job.plane[p].start)[j] = value;
            }
        }
    }
}
