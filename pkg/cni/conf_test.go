package cni

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
)

func TestConfDefaults(t *testing.T) {
	conf, err := parseConf([]byte(`{"cniVersion": "1.1.0", "name": "pods", "type": "tunnel-cni",
		"subnets": ["10.88.1.0/24", "fd00:88:1::/64"]}`))
	if err != nil {
		t.Fatal(err)
	}
	if conf.Bridge != "tunnel0" || conf.DataDir != "/var/lib/cni/tunnel" || conf.MTU != 0 {
		t.Errorf("the defaults are bridge %q, datadir %q, mtu %d", conf.Bridge, conf.DataDir, conf.MTU)
	}
	if len(conf.Subnets) != 2 || conf.Subnets[1] != netip.MustParsePrefix("fd00:88:1::/64") {
		t.Errorf("the subnets are %v", conf.Subnets)
	}
}

func TestConfRefuses(t *testing.T) {
	for conf, want := range map[string]string{
		`{"subnets": ["10.88.1.5/24"]}`:                    "did you mean 10.88.1.0/24?",
		`{"subnets": ["10.88.1.0/31"]}`:                    "no room for a gateway and a pod",
		`{"subnets": ["fd00::/127"]}`:                      "no room for a gateway and a pod",
		`{"subnets": ["10.88.1.0/24", "10.88.2.0/24"]}`:    "at most one of IPv4 and one of IPv6",
		`{"subnets": ["::ffff:10.88.1.0/120"]}`:            "write it as IPv4",
		`{"subnets": ["127.0.0.0/8"]}`:                     "pods cannot have such addresses",
		`{"subnets": ["fe80::/64"]}`:                       "pods cannot have such addresses",
		`{"subnets": [""]}`:                                "an entry is empty",
		`{"subnets": ["10.88.1.0"]}`:                       "10.88.1.0",
		`{"subnets": ["fd00:88::/64"], "mtu": 1279}`:       "IPv6 needs 1280 or more",
		`{"mtu": 67}`:                                      "from 68 to 65535",
		`{"mtu": 65536}`:                                   "from 68 to 65535",
		`{"bridge": "a-name-too-long-for-linux"}`:          "bridge",
		`{"bridge": "../x"}`:                               "bridge",
		`{"datadir": "tunnel"}`:                            "the path must be absolute",
		`{"subnets": "10.88.1.0/24"}`:                      "reading the network configuration",
		`{"mtu": "1500"}`:                                  "reading the network configuration",
		`{"datadir": "x", "mtu": 1, "bridge": "a/b/c/d:"}`: "absolute",
	} {
		_, err := parseConf([]byte(conf))
		e, ok := errors.AsType[*types.Error](err)
		if !ok {
			t.Errorf("%s: the error is %v, not one of the specification", conf, err)
			continue
		}
		if text := e.Msg + " " + e.Details; !strings.Contains(text, want) {
			t.Errorf("%s: %q does not say %q", conf, text, want)
		}
		if e.Code != types.ErrInvalidNetworkConfig && e.Code != types.ErrDecodingFailure {
			t.Errorf("%s: the code is %d", conf, e.Code)
		}
	}
}

func FuzzParseConf(f *testing.F) {
	f.Add([]byte(`{"cniVersion": "1.1.0", "name": "pods", "subnets": ["10.88.1.0/24", "fd00:88:1::/64"], "mtu": 1400}`))
	f.Add([]byte(`{"subnets": [""]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		conf, err := parseConf(data)
		if err != nil {
			return
		}
		for _, subnet := range conf.Subnets {
			if !usable(subnet, gatewayOf(subnet).Next()) {
				t.Errorf("subnet %s has no address for a pod", subnet)
			}
			if usable(subnet, gatewayOf(subnet)) || usable(subnet, subnet.Addr()) {
				t.Errorf("subnet %s gives its own address or its gateway to a pod", subnet)
			}
		}
	})
}

func TestPodOf(t *testing.T) {
	pod, err := podOf("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=f00;" +
		"K8S_POD_UID=5d0;SOMETHING=else")
	if want := (Pod{"shop", "web-0", "5d0"}); err != nil || pod != want {
		t.Errorf("the pod is %v, %v, want %v", pod, err, want)
	}
	if pod, err := podOf(""); err != nil || pod != (Pod{}) {
		t.Errorf("without CNI_ARGS the pod is %v, %v", pod, err)
	}
	if _, err := podOf("SOMETHING=else"); err == nil {
		t.Error("an unknown argument without IgnoreUnknown is accepted; the specification has plugins refuse it")
	}
}
