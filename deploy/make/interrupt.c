/* Lets `make run` be stopped by SIGINT however it was started.
 *
 * GNU make, when it alone gets SIGINT, waits for the recipe without passing the signal on, and in
 * a background job of a script it ignores SIGINT altogether. SIGTERM it does pass on. Loaded by
 * the Makefile where there is a C compiler; without one, Ctrl-C in a terminal works all the same.
 */
#include <signal.h>

int plugin_is_GPL_compatible;

static void pass_on(int number) {
  (void)number;
  raise(SIGTERM);
}

int interrupt_gmk_setup(void) {
  signal(SIGINT, pass_on);
  return 1;
}
