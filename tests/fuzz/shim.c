/* Tells libFuzzer where Zig's -ffuzz has its counters: Zig makes no module constructor that would. */
extern char __start___sancov_cntrs[], __stop___sancov_cntrs[];
extern void __sanitizer_cov_8bit_counters_init(char *, char *);
extern int LLVMFuzzerRunDriver(int *, char ***, int (*)(const unsigned char *, unsigned long));
extern int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long);

int main(int count, char **arguments) {
    __sanitizer_cov_8bit_counters_init(__start___sancov_cntrs, __stop___sancov_cntrs);
    return LLVMFuzzerRunDriver(&count, &arguments, LLVMFuzzerTestOneInput);
}
