// Shows the OpenAPI document of this gateway.

if (typeof SwaggerUIBundle === "undefined") document.getElementById("problem").hidden = false;
else SwaggerUIBundle({ url: "/openapi.json", dom_id: "#api" });
