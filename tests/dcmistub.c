/* A stand-in for libdcmi.so with two cards, the second of two chips; written from the public
 * interface. DCMISTUB=fail: dcmi_init fails; hang: readings take 30 s; old: no HBM call answers. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
struct hbm { unsigned long long size; unsigned freq; unsigned long long used; int temp; unsigned band; };
struct chip { char type[32], name[32], version[32]; unsigned cores; };
struct ecc { int on; unsigned single, twice, all_single, all_twice, pages, pages2; };
static int is(const char *word) { const char *s = getenv("DCMISTUB"); return s && !strcmp(s, word); }
int dcmi_init(void) { return is("fail") ? -8005 : 0; }
int dcmi_get_card_list(int *n, int *list, int len) {
  if (is("hang")) sleep(30);
  if (len < 2) return -1;
  *n = 2; list[0] = 0; list[1] = 4; return 0;
}
int dcmi_get_device_num_in_card(int card, int *n) { *n = card == 4 ? 3 : 1; return 0; }
/* the third device of the second card is its controller, no NPU */
int dcmi_get_device_type(int card, int dev, int *kind) { (void)card; *kind = dev == 2 ? 1 : 0; return 0; }
int dcmi_get_device_logic_id(int *id, int card, int dev) { *id = card == 4 ? 1 + dev : 0; return 0; }
int dcmi_get_device_utilization_rate(int card, int dev, int type, unsigned *rate) {
  if (type != 2) return -8255;
  *rate = card == 4 ? 30 + dev : 88; return 0;
}
int dcmi_get_device_temperature(int card, int dev, int *t) { (void)dev; *t = 50 + card; return 0; }
int dcmi_get_device_power_info(int card, int dev, int *p) { if (card == 4 && dev == 1) return -8255; *p = 1624; return 0; }
int dcmi_get_device_hbm_info(int card, int dev, struct hbm *h) {
  (void)card; (void)dev;
  if (is("old")) return -8255;
  h->size = 65536; h->used = 3197; h->temp = 44; h->band = 57; h->freq = 1600; return 0;
}
int dcmi_get_device_chip_info(int card, int dev, struct chip *c) { (void)card; (void)dev; memset(c, 0, sizeof *c); strcpy(c->name, "910B4"); return 0; }
int dcmi_get_device_health(int card, int dev, unsigned *h) { (void)dev; *h = card == 4 ? 1 : 0; return 0; }
int dcmi_get_device_ecc_info(int card, int dev, int type, struct ecc *e) { (void)card; (void)dev; (void)type; memset(e, 0, sizeof *e); e->single = 2; return 0; }
