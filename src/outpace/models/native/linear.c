/* One product of rows with a packed matrix on its own: for models whose layers are not written here. */
#include "outpace.h"

typedef struct {
    const Matrix *matrix;
    const Inputs *rows;
    float *result;
} Linear;

static void linear_member(void *data, Member *member) {
    const Linear *linear = data;
    const Matrix *matrix = linear->matrix;
    const Inputs *rows = linear->rows;
    if (matrix->format >= Q8) {
        for (int row; (row = next_task(member)) < rows->count;) {
            quantise(rows, row, 0, rows->groups, 1 << matrix->format);
        }
        meet(member);
    }
    int tasks = product_tasks(matrix);
    for (int task; (task = next_task(member)) < tasks;) {
        product(matrix, rows, task, linear->result, matrix->outputs, 0);
    }
}

/* Rows with the forms that the matrix needs -> result [rows, outputs]. The forms are scratch and filled in here. */
void run_linear(const Matrix *matrix, const Inputs *rows, float *result, int threads) {
    Linear linear = {matrix, rows, result};
    run_team(threads, linear_member, &linear);
}
