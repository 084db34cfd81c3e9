// In the place of CuPy's, which calls a GPU's conversions: the compiler's own numbers of 16 bits, for twins.
#pragma once
struct float16 {
    _Float16 value;
    float16() = default;
    template <class T>
    explicit float16(T number) : value((_Float16)(float)number) {}
    float16(float number) : value((_Float16)number) {}
    operator float() const { return (float)value; }
    bool isnan() const { return value != value; }
    bool iszero() const { return value == 0; }
};
inline bool isnan(float16 number) { return number.isnan(); }
inline float16 min(float16 a, float16 b) { return float(b) < float(a) ? b : a; }
inline float16 max(float16 a, float16 b) { return float(a) < float(b) ? b : a; }
