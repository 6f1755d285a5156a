package kube

import (
	"context"
	"net/netip"

	"k8s.io/apimachinery/pkg/labels"
)

// endpointSliceList holds the fields of an EndpointSliceList (k8s.io/api/discovery/v1) that Replicas uses.
type endpointSliceList struct {
	Items []struct {
		Endpoints []struct {
			Addresses []string `json:"addresses"`
		} `json:"endpoints"`
	} `json:"items"`
}

// Replicas returns the addresses of a Service's pods, including pods that are not ready or
// are terminating. A pod that is in none of the Service's EndpointSlices no longer exists.
func (c *Client) Replicas(ctx context.Context, namespace, service string) ([]netip.Addr, error) {
	var list endpointSliceList
	match := labels.Set{"kubernetes.io/service-name": service}.String() // discoveryv1.LabelServiceName
	if err := c.objects.list(ctx, endpointSlices(namespace), match, &list); err != nil {
		return nil, err
	}
	var all []netip.Addr
	for _, slice := range list.Items {
		for _, e := range slice.Endpoints {
			for _, text := range e.Addresses {
				if a, err := netip.ParseAddr(text); err == nil { // otherwise the text is a DNS name (addressType FQDN)
					all = append(all, a.Unmap())
				}
			}
		}
	}
	return all, nil
}
